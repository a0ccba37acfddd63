"""What all tests share: properties are not timed, since a busy machine is no counterexample."""

from hypothesis import settings

settings.register_profile("house", deadline=None, print_blob=True)
settings.load_profile("house")
