"""From a profile and a budget to a plan: metrics, partition, risk, cost, planner."""
