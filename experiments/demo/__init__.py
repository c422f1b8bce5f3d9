"""Train a small GPT with less and less optimizer state, and draw what it costs. A few minutes on two cores.

python -m experiments.demo
"""
