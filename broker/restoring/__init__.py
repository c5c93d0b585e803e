"""Makes a data directory from a capture with bodies.

`from_capture` goes through the steps of `storage.capture.sifting` and rebuilds the stores, and `crew` has the
processes that do their units. `definitions` and `duplicates` restore the entities and the windows of duplicate
detection.
"""
