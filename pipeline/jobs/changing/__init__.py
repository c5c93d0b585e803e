"""The parts of the jobs that change data in a broker (`pipeline.jobs.resubmit` and `drain`)."""
