"""What a long run may meet: kills at any moment, damaged files, and Ctrl-C in the middle of a change.

python -m benchmarks.torture kill --times 200
python -m benchmarks.torture mutate --times 5000
python -m benchmarks.torture interrupt --times 1000
"""
