"""`python -m broker.worker`: one worker process, as the supervisor starts it."""

import sys

from broker.worker.worker import main

sys.exit(main())
