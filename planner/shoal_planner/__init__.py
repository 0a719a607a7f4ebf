"""Arithmetic of training plans: jobs, clusters, plans, costs, schedules. Standard library and numpy."""
