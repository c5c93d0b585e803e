import os

from azure.servicebus import ServiceBusClient, ServiceBusMessage

connection_string = os.environ.get(
    "SERVICEBUS_CONNECTION_STRING",
    "Endpoint=sb://localhost;SharedAccessKeyName=RootManageSharedAccessKey;SharedAccessKey=SAS_KEY_VALUE;"
    "UseDevelopmentEmulator=true;",
)

with ServiceBusClient.from_connection_string(connection_string) as client:
    with client.get_queue_sender("orders") as sender:
        sender.send_messages(ServiceBusMessage("Hello from Python"))
    with client.get_queue_receiver("orders") as receiver:
        for message in receiver.receive_messages(max_wait_time=5):
            print(str(message))
            receiver.complete_message(message)
