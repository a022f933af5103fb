"""A loss function as a coroutine, and what it must find, or must not read, when it goes on."""
