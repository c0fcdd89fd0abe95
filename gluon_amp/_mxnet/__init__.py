"""The only modules that touch MXNet's private names; each begins with what for."""
