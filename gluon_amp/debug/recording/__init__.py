"""One recorder of what MXNet runs, and what reads it: the engine's words, and a tape of every value and gradient."""
