"""Sends to a queue and receives from it through an outage.

    outage_clients.py sync|async CONNECTION_STRING QUEUE SECONDS

Prints `sent NUMBER` and `received NUMBER`. Errors that the SDK tells, or logs, are on standard error.
"""

import asyncio
import logging
import sys
import threading
import time

from azure.servicebus import ServiceBusClient, ServiceBusMessage
from azure.servicebus.aio import ServiceBusClient as AsyncClient

style, connection_string, queue, seconds = sys.argv[1:]
end = time.monotonic() + float(seconds)
logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(name)s: %(message)s")


def say(what: str, number: object) -> None:
    sys.stdout.write(f"{what} {number}\n")
    sys.stdout.flush()


def tell(role: str, error: Exception) -> None:
    print(f"{role}: {error!r}", file=sys.stderr, flush=True)


def send() -> None:
    number = 0
    with ServiceBusClient.from_connection_string(connection_string) as client, client.get_queue_sender(queue) as sender:
        while time.monotonic() < end:
            try:
                sender.send_messages(ServiceBusMessage(str(number), message_id=str(number)))
                say("sent", number)
            except Exception as error:
                tell("sender", error)
            number += 1
            time.sleep(0.05)


def receive() -> None:
    """A new receiver for each failure, as programs that run for long do."""
    with ServiceBusClient.from_connection_string(connection_string) as client:
        while time.monotonic() < end:
            try:
                with client.get_queue_receiver(queue) as receiver:
                    while time.monotonic() < end:
                        for message in receiver.receive_messages(max_message_count=10, max_wait_time=1):
                            receiver.complete_message(message)
                            say("received", message.message_id)
            except Exception as error:
                tell("receiver", error)
                time.sleep(0.2)


async def send_async() -> None:
    number = 0
    async with (
        AsyncClient.from_connection_string(connection_string) as client,
        client.get_queue_sender(queue) as sender,
    ):
        while time.monotonic() < end:
            try:
                await sender.send_messages(ServiceBusMessage(str(number), message_id=str(number)))
                say("sent", number)
            except Exception as error:
                tell("sender", error)
            number += 1
            await asyncio.sleep(0.05)


async def receive_async() -> None:
    async with AsyncClient.from_connection_string(connection_string) as client:
        while time.monotonic() < end:
            try:
                async with client.get_queue_receiver(queue) as receiver:
                    while time.monotonic() < end:
                        for message in await receiver.receive_messages(max_message_count=10, max_wait_time=1):
                            await receiver.complete_message(message)
                            say("received", message.message_id)
            except Exception as error:
                tell("receiver", error)
                await asyncio.sleep(0.2)


async def both() -> None:
    await asyncio.gather(send_async(), receive_async())


if style == "async":
    asyncio.run(both())
else:
    threads = [threading.Thread(target=each) for each in (send, receive)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
