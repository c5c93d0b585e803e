"""What users of azure-servicebus wait: a program of `waits.py`, with the SDK's default settings. Runs until killed."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from azure.servicebus import ServiceBusClient, ServiceBusMessage, ServiceBusReceiveMode
from azure.servicebus.management import ServiceBusAdministrationClient

CONFIG = json.loads(os.environ["PEEKLOCK_INTEROP"])
USERS, PERIOD_S = CONFIG["users"], CONFIG["period_s"]


class User:
    """It does one kind of operation, once in each period."""

    def __init__(self, operation: str, number: int) -> None:
        self.operation, self.number = operation, number
        self.client = ServiceBusClient.from_connection_string(CONFIG["connection_string"])
        self.queue = f"waits-{operation}"
        self.count = 0

    def timed(self, call: Callable[[], Any]) -> Any:
        """The result of the call, which is reported; None if it failed."""
        began, result, error = time.time(), None, ""
        try:
            result = call()
        except Exception as failure:
            error = type(failure).__name__
        seconds = time.time() - began
        said = {"operation": self.operation, "user": self.number, "began": began, "seconds": seconds, "error": error}
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()
        return None if error else (result,)

    def run(self) -> None:
        once = getattr(self, self.operation)()
        while True:
            # Each user has its own point in the period.
            time.sleep(PERIOD_S - (time.time() - self.number * PERIOD_S / USERS) % PERIOD_S)
            try:
                next(once)
            except Exception as error:  # of what is not reported
                print(f"{self.operation}: {error!r}", file=sys.stderr, flush=True)
                once = getattr(self, self.operation)()

    # Each is a generator that does the operation once before each `yield`.

    def send(self) -> Any:
        sender = self.client.get_queue_sender(self.queue)
        while True:
            self.timed(lambda: sender.send_messages(ServiceBusMessage("m")))
            yield

    def receive(self) -> Any:
        receiver = self.client.get_queue_receiver(self.queue, receive_mode=ServiceBusReceiveMode.RECEIVE_AND_DELETE)
        while True:
            self.timed(lambda: receiver.receive_messages(1, max_wait_time=60)[0])
            yield

    def complete(self) -> Any:
        receiver = self.client.get_queue_receiver(self.queue)
        while True:
            [message] = receiver.receive_messages(1, max_wait_time=60)
            time.sleep(PERIOD_S / 2)
            self.timed(lambda message=message: receiver.complete_message(message))
            yield

    def renew(self) -> Any:
        receiver = self.client.get_queue_receiver(self.queue)
        message = None
        while True:
            if message is None:
                [message] = receiver.receive_messages(1, max_wait_time=60)
            if self.timed(lambda message=message: receiver.renew_message_lock(message)) is None:
                message = None  # its lock may be lost
            yield

    def accept(self) -> Any:
        while True:
            receiver = self.client.get_queue_receiver(self.queue, session_id=f"session-{self.number}")
            self.timed(receiver.__enter__)
            receiver.close()
            yield

    def administer(self) -> Any:
        admin = ServiceBusAdministrationClient.from_connection_string(
            CONFIG["secure"], connection_verify=CONFIG["authority"]
        )
        while True:
            self.count += 1
            name = f"made-{self.number}-{os.getpid()}-{self.count}"
            self.timed(lambda name=name: admin.create_queue(name))
            yield
            self.timed(lambda name=name: admin.delete_queue(name))
            yield


for operation in CONFIG["operations"]:
    for number in range(USERS):
        threading.Thread(target=User(operation, number).run).start()
