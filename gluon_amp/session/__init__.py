"""What users switch on, and how MXNet is made to obey.

``autocast``     init, deinit, autocast, exclude
``functions``    the precision of users' own functions and operators
``steps``        functions, generators and coroutines that run in a region
``hooks``        the few names of MXNet that are replaced
``block_calls``  calls of blocks: where low precision begins and ends
"""
