"""What a graph becomes under a setting, and what runs it: read ``planner`` first."""
