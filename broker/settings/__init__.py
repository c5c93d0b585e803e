"""Reads the settings of a broker from flags, environment and file, and documents them."""
