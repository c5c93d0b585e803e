"""Converts messages between the forms in which they are sent, stored and delivered.

`sections` finds the sections of a message, `fields` checks their fields, `intake` converts it to the stored form
(`layout`), `rendering` makes a delivery of the stored form, and `batches` splits batches.
"""
