"""Operations with a readable reference and one implementation per platform.

Each operation is a folder: ``reference.py`` is the definition, ``api.py`` picks
the implementation from the platform at trace time, and the others are
implementations. Nothing above this room knows what platform it runs on.
"""
