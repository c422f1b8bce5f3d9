"""The pictures of the README and of the documentation, from real plans, the table that ships and a real run.

python -m experiments.pictures --output docs/pictures
"""
