"""Stands between an application and its primary namespace, so that sends of any client fail over.

`through` passes frames to the primary, and `split_session` translates sessions of which `here` answers a part. The
sockets are in `connection` and `service`.
"""
