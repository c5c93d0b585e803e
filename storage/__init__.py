"""Stores a partition: tables of records with checksums in LMDB, their verification, and their backup."""
