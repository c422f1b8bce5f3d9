"""Trainings that show what the package does. They use its public API only, and run on a CPU with no downloads.

python -m experiments --help
"""
