"""What a long run may go through: being killed at any moment, and files that are not what they were.

python -m benchmarks.torture kill --times 200
python -m benchmarks.torture mutate --times 5000
"""
