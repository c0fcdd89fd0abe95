"""Record what MXNet runs: calls and times, or every value and gradient on a tape."""
