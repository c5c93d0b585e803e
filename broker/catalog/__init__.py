"""Keeps the stored definitions of entities in line with the declared ones, and checks changes that clients ask for."""
