"""Connects the processes of a namespace on several machines by TCP and TLS, and notices when one falls silent."""
