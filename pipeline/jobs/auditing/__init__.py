"""The parts of the flow audit (`pipeline.jobs.audit`): offsets, messages in queues, moves, and ids."""
