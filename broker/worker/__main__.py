"""`python -m broker.worker`: one worker process, as the supervisor starts it."""

import sys

from broker.child import collect_rarely, keep_freed
from broker.worker.process import main

collect_rarely()
keep_freed()
sys.exit(main())
