"""Asks the management API over HTTP to list and change entities, that of Peeklock or of Azure Service Bus."""
