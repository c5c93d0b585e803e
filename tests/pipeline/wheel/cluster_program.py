"""A program as a cluster runs it that has the wheel alone: it reads a capture, a journal and a queue, and sends.

It prints what it has found as JSON, in its last line.
"""

import json
import sys

from pyspark.sql import SparkSession

import pyspark_peeklock
from pyspark_peeklock import DefaultSource
from storage.capture.reading import captured


def main(secret: str, http_endpoint: str, capture: str) -> None:
    spark = SparkSession.builder.appName("cluster program").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    spark.dataSource.register(DefaultSource)
    peeklock = spark.read.format("peeklock").option("connectionStringFile", secret)
    journal = peeklock.options(mode="journal", httpEndpoint=http_endpoint, entity="orders", capturePath=capture).load()
    sent = journal.where("op = 'enqueued'").select("body", "messageId")
    sent.write.format("peeklock").mode("append").options(connectionStringFile=secret, entity="checked").save()
    browsed = spark.read.format("peeklock").options(connectionStringFile=secret, entity="checked").load()
    found = {
        "captured": spark.read.parquet(*captured(capture).uris()).where("op = 'enqueued'").count(),
        "journal": sent.count(),
        "browsed": sorted(bytes(row.body).decode() for row in browsed.collect()),
        "package": pyspark_peeklock.__file__,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
