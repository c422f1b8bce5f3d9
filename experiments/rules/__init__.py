"""Update rules that spend memory, changes that cost none, and rules without momentum: prototypes and their runs.

    python -m experiments.rules --data DIR --output docs/results/rules

Prototypes are plain torch around the library's own updates, so that a rule is measured before it is built.
"""
