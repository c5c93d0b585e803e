"""Sends numbers to a queue for some seconds: `outage.py CONNECTION_STRING QUEUE SECONDS`. Prints those accepted."""

import sys
import time

from azure.servicebus import ServiceBusClient, ServiceBusMessage

connection_string, queue, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
end = time.monotonic() + seconds
with ServiceBusClient.from_connection_string(connection_string) as client, client.get_queue_sender(queue) as sender:
    number = 0
    while time.monotonic() < end:
        try:
            sender.send_messages(ServiceBusMessage(str(number), message_id=str(number)))
            print(number, flush=True)
        except Exception as error:
            print(repr(error), file=sys.stderr)
        number += 1
        time.sleep(0.05)
