"""The journal of a partition: what happened to each message, as rows with contiguous offsets.

events         what a worker's log says besides the changes of the tables; pure
rows           the schema of a row, and the rows of a frame of the log; pure
files          the files with the rows of one partition: appended to, read by offset, deleted when they are old
batches        a range of offsets as a stream of Arrow's IPC
frames         the bytes of such a file; pure
"""
