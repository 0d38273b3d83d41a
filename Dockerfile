# The node, the worker SDK and the demo in one image, without a GPU.
#   docker build -t worldmove . && docker run --rm worldmove
FROM python:3.12-slim AS build
WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY worldmove worldmove
COPY api api
ARG EXTRAS=host
RUN python -m venv /opt/worldmove \
    && /opt/worldmove/bin/pip install --no-cache-dir -c constraints.txt setuptools \
    && /opt/worldmove/bin/pip install --no-cache-dir -c constraints.txt --no-build-isolation ".[${EXTRAS}]" \
    && /opt/worldmove/bin/pip uninstall --yes setuptools

FROM python:3.12-slim
# The keeper outlives its node and is then a child of process 1, which has to reap it: hence tini.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 worldmove
COPY --from=build /opt/worldmove /opt/worldmove
ENV PATH=/opt/worldmove/bin:$PATH PYTHONUNBUFFERED=1
USER worldmove
WORKDIR /home/worldmove
STOPSIGNAL SIGTERM
ENTRYPOINT ["tini", "--", "worldmove"]
CMD ["demo"]
