"""What is in force, and on which devices: read ``in_force`` first."""
