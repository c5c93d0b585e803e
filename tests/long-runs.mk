# What runs for minutes or hours, and is not among the tests that a change waits for.
#
#   make soak              mixed load for 10 minutes or hours, with memory, files and counts  ARGS="--minutes 60"
#   make fuzz              mutated sessions, said to the engine and to a running broker  ARGS="--seconds 600"
#   make fuzz-native       libFuzzer on the C of protocol/native, with its coverage; needs clang
#   make power-loss        brokers under load lose their power 10,000 times  ARGS="--losses 100"
#   make disk-full         a disk that is full again and again under load, with kills; needs root  ARGS="--rounds 20"
#   make hostile-peers     an hour of peers that cost the most they can, with the memory of each process  ARGS="--minutes 10"
#   make mutants           144 bugs, each planted alone, and the tests that find them  ARGS="--at-random 10 --seconds 600"
#   make split             hosts of their own, cut links, killed processes, a queue that moves, for 10 minutes; needs root
#   make pairing-ledger    two paired brokers, the primary killed, stopped, cut off and slowed for half an hour
#   make drain             how fast a syphon drains 1,000,000 messages, and in how much memory
#   make sdk-ledger        kill each process in turn under the .NET SDK's senders and processors; needs .NET  ARGS="--kills 50"
#   make losing-a-worker   what clients of a partitioned queue notice when a worker is killed
#   make waits             what users of each SDK wait when a process is killed, for docs/failures.md; 10 minutes  ARGS="--write"
#   make capture-s3        captures in an object store: a server that speaks S3
#   make kill-drivers      kill the drivers of jobs that change data, which takes a minute of CPU; needs Java
#   make pipeline-cluster  a stream and a job on a standalone cluster of Spark, with kills, and what happens line by line
#   make pipeline-kills    the same with kills at random  ARGS="--minutes 10"
#   make pipeline-pods     all jobs of deploy/kubernetes/pipeline in Spark's Kubernetes mode, with processes as pods
#   ARGS="--help" lists the options of most.

.PHONY: long-runs soak fuzz fuzz-native power-loss disk-full hostile-peers mutants split pairing-ledger drain kill-drivers sdk-ledger losing-a-worker waits capture-s3 pipeline-cluster pipeline-kills pipeline-pods

long-runs:
	@sed -n 's/^#   //p' tests/long-runs.mk

soak: $(EXTENSION)
	$(BIN)/python -m tests.soak.run $(ARGS)

fuzz: $(EXTENSION)
	$(BIN)/python -m tests.fuzz.run $(ARGS)

fuzz-native: $(EXTENSION)
	$(BIN)/python -m tests.fuzz.native_targets $(ARGS)

power-loss: $(EXTENSION)
	$(BIN)/python -m tests.power_loss.run $(ARGS)

disk-full: $(EXTENSION)
	$(BIN)/python -m tests.disk_full.run $(ARGS)

hostile-peers: $(BENCH_INSTALLED) # it draws the memory
	$(BIN)/python -m tests.hostile_peers.run $(ARGS)

mutants: $(EXTENSION)
	$(BIN)/python -m tests.mutants.run $(ARGS)

split: $(EXTENSION)
	$(BIN)/python -m tests.cluster.split $(ARGS)

pairing-ledger: $(EXTENSION)
	$(BIN)/python -m tests.pairing.ledger $(ARGS)

drain: $(EXTENSION)
	$(BIN)/python -m tests.pairing.drain $(ARGS)

kill-drivers: $(SPARK_INSTALLED)
	PEEKLOCK_REQUIRE_SPARK=1 PEEKLOCK_KILL_DRIVERS=1 $(BIN)/python -m pytest -k killed $(or $(ARGS),tests/pipeline/changes)

sdk-ledger: $(EXTENSION)
	$(BIN)/python -m tests.sdk_ledger.run $(ARGS)

losing-a-worker: $(EXTENSION)
	$(BIN)/python -m tests.partitioned.losing_a_worker $(ARGS)

# It installs the SDKs that are missing first, which takes longer.
waits: $(EXTENSION)
	$(BIN)/python -m tests.interop.waits $(ARGS)

capture-s3: $(EXTENSION)
	$(BIN)/python -m pip install --quiet --group s3
	$(BIN)/python -m pytest tests/capture/test_capture_object_store.py $(ARGS)

pipeline-cluster: $(SPARK_INSTALLED)
	$(BIN)/python -m tests.pipeline.kills --once $(ARGS)

pipeline-kills: $(SPARK_INSTALLED)
	$(BIN)/python -m tests.pipeline.kills $(ARGS)

pipeline-pods: $(SPARK_INSTALLED)
	PEEKLOCK_ALL_PODS=1 $(BIN)/python -m pytest tests/deployment/test_pipeline_pods.py $(ARGS)
