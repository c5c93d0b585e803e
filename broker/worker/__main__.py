"""`python -m broker.worker`: one worker process, as the supervisor starts it."""

import sys

from broker.child import collect_rarely
from broker.worker.process import main

collect_rarely()
sys.exit(main())
