"""Keeps 300 messages with AutoLockRenewer for longer than their locks: `renewing.py threads|tasks QUEUE`."""

import asyncio
import json
import os
import sys
import time

from azure.servicebus import AutoLockRenewer, ServiceBusClient, ServiceBusMessage
from azure.servicebus.aio import AutoLockRenewer as AsyncAutoLockRenewer
from azure.servicebus.aio import ServiceBusClient as AsyncServiceBusClient

# The threads of 7.15.0 take each other's responses and then wait 0.2 s for their own, so that they renew some 30 locks
# in a second on an idle machine, and they begin 10 s before a lock ends: 300 locks that end at the same time are too
# many, and on a busy machine 100 that end within 6 s of others.
SHARES = 3
SHARE = 100
BETWEEN_S = 10.0
HELD_S = 47.0  # after the last share; the locks last 45 s
COUNT = SHARES * SHARE
CONNECTION_STRING = json.loads(os.environ["PEEKLOCK_INTEROP"])["connection_string"]

failures: list[object] = []


def failed(message: object, error: object) -> None:
    failures.append(error)


async def failed_in_task(message: object, error: object) -> None:
    failures.append(error)


def threads(queue: str) -> None:
    with ServiceBusClient.from_connection_string(CONNECTION_STRING, retry_total=0) as client:
        with client.get_queue_sender(queue) as sender:
            sender.send_messages([ServiceBusMessage("x") for _ in range(COUNT)])
        with AutoLockRenewer(max_workers=4) as renewer, client.get_queue_receiver(queue) as receiver:
            held = []
            for share in range(1, SHARES + 1):
                while len(held) < share * SHARE:
                    some = receiver.receive_messages(share * SHARE - len(held), max_wait_time=10)
                    for message in some:
                        renewer.register(receiver, message, on_lock_renew_failure=failed)
                    held += some
                time.sleep(BETWEEN_S if share < SHARES else HELD_S)
            renewer.close()  # its threads would slow the rest down
            for message in held:
                receiver.complete_message(message)


async def tasks(queue: str) -> None:
    async with AsyncServiceBusClient.from_connection_string(CONNECTION_STRING, retry_total=0) as client:
        async with client.get_queue_sender(queue) as sender:
            await sender.send_messages([ServiceBusMessage("x") for _ in range(COUNT)])
        async with AsyncAutoLockRenewer() as renewer, client.get_queue_receiver(queue) as receiver:
            held = []
            for share in range(1, SHARES + 1):
                while len(held) < share * SHARE:
                    some = await receiver.receive_messages(share * SHARE - len(held), max_wait_time=10)
                    for message in some:
                        renewer.register(receiver, message, on_lock_renew_failure=failed_in_task)
                    held += some
                await asyncio.sleep(BETWEEN_S if share < SHARES else HELD_S)
            await renewer.close()
            for message in held:
                await receiver.complete_message(message)


if __name__ == "__main__":
    if sys.argv[1] == "threads":
        threads(sys.argv[2])
    else:
        asyncio.run(tasks(sys.argv[2]))
    print(failures or "kept", COUNT)
