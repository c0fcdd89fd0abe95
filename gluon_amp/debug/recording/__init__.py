"""One recorder of what MXNet runs, with two readers: the engine's reports, and a tape of every value and gradient."""
