# The broker in a container: data in /var/lib/peeklock, everything else may be read-only.
#
#   docker build -t peeklock .
#   docker run --read-only -v peeklock:/var/lib/peeklock -p 127.0.0.1:5672:5672 -p 127.0.0.1:5300:5300 peeklock
#
# It has a queue, orders (deploy/container.toml). The connection string is in the output of the first start. With
# -e ACCEPT_EULA=Y it is the Service Bus emulator, with the emulator's entities and key (docs/emulator.md).
# deploy/compose.yaml has a whole set-up.

FROM python:3.11-slim AS build
WORKDIR /src
# python-qpid-proton has no wheels: it is compiled here, which needs a compiler and headers.
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends gcc libc6-dev
# Everything is installed in the versions of the lock files, and only if its hash is there (`make lock` writes them).
COPY deploy/build.lock deploy/requirements.lock ./
RUN python -m venv /opt/build && \
    /opt/build/bin/pip install --no-cache-dir --require-hashes -r build.lock && \
    /opt/build/bin/pip wheel --no-cache-dir --no-build-isolation --require-hashes -w /wheels -r requirements.lock
COPY pyproject.toml README.md LICENSE ./
COPY protocol protocol
COPY storage storage
COPY broker broker
COPY pipeline pipeline
RUN /opt/build/bin/pip wheel --no-cache-dir --no-build-isolation --no-deps -w /wheels . && \
    python -m venv --without-pip /opt/peeklock && \
    /opt/build/bin/pip --python /opt/peeklock install --no-compile --no-index --find-links /wheels peeklock && \
    # Compiled here, because at run time nothing can be written beside the sources.
    python -m compileall -q --invalidation-mode unchecked-hash /opt/peeklock/lib

FROM python:3.11-slim
LABEL org.opencontainers.image.title="Peeklock" \
      org.opencontainers.image.description="A standalone AMQP 1.0 broker with the semantics of Azure Service Bus"
RUN groupadd --gid 10001 peeklock && \
    useradd --uid 10001 --gid peeklock --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin peeklock && \
    install -d -o peeklock -g peeklock -m 0700 /var/lib/peeklock
COPY --from=build /opt/peeklock /opt/peeklock
COPY deploy/healthcheck /opt/peeklock/healthcheck
COPY deploy/container.toml /etc/peeklock/peeklock.toml
# What the broker compares that file with, and takes in place of it where it stands in for the Service Bus emulator.
COPY deploy/container.toml /opt/peeklock/image/peeklock.toml
COPY deploy/emulator.json /opt/peeklock/image/Config.json

ENV PATH=/opt/peeklock/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    PEEKLOCK_DATA_DIR=/var/lib/peeklock \
    PEEKLOCK_CONFIG=/ServiceBus_Emulator/ConfigFiles/Config.json:/etc/peeklock/peeklock.toml \
    PEEKLOCK_IMAGE=/opt/peeklock/image \
    PEEKLOCK_AMQP__HOST=0.0.0.0 \
    PEEKLOCK_HTTP__HOST=0.0.0.0 \
    PEEKLOCK_OPS__HOST=0.0.0.0 \
    PEEKLOCK_LOG__FORMAT=json
USER 10001:10001
WORKDIR /var/lib/peeklock
VOLUME /var/lib/peeklock
EXPOSE 5672 5671 5300 443 5680 9464
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=6s --start-period=30s --retries=3 CMD ["/opt/peeklock/healthcheck"]
ENTRYPOINT ["peeklock"]
# Mount a file at one of the places in PEEKLOCK_CONFIG with the entities that you want, or create them while it runs.
CMD ["serve"]
