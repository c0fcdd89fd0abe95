"""The only modules that touch MXNet's private names; each says at its top why."""
