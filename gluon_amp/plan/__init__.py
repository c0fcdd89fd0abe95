"""Plans: graphs as rewritten under a setting, and the cached ops and executors that run them. Begin at ``planner``."""
