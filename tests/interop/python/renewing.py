"""Keeps 300 messages with AutoLockRenewer for longer than their locks: `renewing.py threads|tasks QUEUE`."""

import asyncio
import json
import os
import sys
import time

from azure.servicebus import AutoLockRenewer, ServiceBusClient, ServiceBusMessage
from azure.servicebus.aio import AutoLockRenewer as AsyncAutoLockRenewer
from azure.servicebus.aio import ServiceBusClient as AsyncServiceBusClient

# Of two threads one renews. When more do, one can read the response that another waits for before the other has noted
# that it asked: 7.15.0 then drops the response, and the thread waits for ever, as soon as a broker answers at once.
THREADS = 2
COUNT = 300
HELD_S = 50.0  # the locks last 45 s
# The library renews in the last 10 s. This process needs some of them for 300 messages, and more on a busy machine.
RENEWS_BEFORE_END_S = 30
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
        with AutoLockRenewer(max_workers=THREADS) as renewer, client.get_queue_receiver(queue) as receiver:
            renewer._renew_period = RENEWS_BEFORE_END_S
            held = []
            while len(held) < COUNT:
                some = receiver.receive_messages(COUNT - len(held), max_wait_time=10)
                for message in some:
                    renewer.register(receiver, message, on_lock_renew_failure=failed)
                held += some
            time.sleep(HELD_S)
            renewer.close()
            for message in held:
                receiver.complete_message(message)


async def tasks(queue: str) -> None:
    async with AsyncServiceBusClient.from_connection_string(CONNECTION_STRING, retry_total=0) as client:
        async with client.get_queue_sender(queue) as sender:
            await sender.send_messages([ServiceBusMessage("x") for _ in range(COUNT)])
        async with AsyncAutoLockRenewer() as renewer, client.get_queue_receiver(queue) as receiver:
            renewer._renew_period = RENEWS_BEFORE_END_S
            held = []
            while len(held) < COUNT:
                some = await receiver.receive_messages(COUNT - len(held), max_wait_time=10)
                for message in some:
                    renewer.register(receiver, message, on_lock_renew_failure=failed_in_task)
                held += some
            await asyncio.sleep(HELD_S)
            await renewer.close()
            for message in held:
                await receiver.complete_message(message)


if __name__ == "__main__":
    if sys.argv[1] == "threads":
        threads(sys.argv[2])
    else:
        asyncio.run(tasks(sys.argv[2]))
    print(failures or "kept", COUNT)
