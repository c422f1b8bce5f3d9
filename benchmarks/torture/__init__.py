"""What a long run may meet: kills, damaged files, Ctrl-C, ranks that fail alone, shared memory, odd arguments.

python -m benchmarks.torture kill --times 200
python -m benchmarks.torture mutate --times 5000
python -m benchmarks.torture interrupt --times 1000
python -m benchmarks.torture distributed --times 100
python -m benchmarks.torture race --times 200
python -m benchmarks.torture arguments --times 2000
python -m benchmarks.torture defaults --times 200

Each command prints how often it did what, and its findings. The exit code is 1 if there are any. A finding names its
number: the same ``--seed`` draws it again.
"""
