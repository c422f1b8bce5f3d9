"""What everything else is said in: slots, codecs, mechanisms, configurations, roles and the plan file."""
