"""Configurations (update rule and codecs), parameter roles, plans and budgets: what all other packages build on."""
