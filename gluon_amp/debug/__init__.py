"""See what mixed precision did to a network, and find what went wrong."""
