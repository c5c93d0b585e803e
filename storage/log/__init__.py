"""The commit log of a worker: what its partitions changed since their tables were last brought up to date.

frames         bytes of segments and frames; pure
changes        what one turn changes in a partition, and the net effect of many turns; pure
segments       the files that frames are written to and read from
reading        the log as found on disk: which frames are whole, and whether any are missing
tail           follows the log of a worker that goes on writing
tables         applies net effects to a partition's LMDB tables
recovery       brings the tables up to date from the log
checkpointer   the process that does so while the worker goes on
writer         writes frames to the segments, one after the other
commit_log     the worker's side: one frame and one sync for each turn
logged_store   a partition's Store: young data in memory over the tables
"""
