# syntax=docker/dockerfile:1
# Two images from one build: `--target gateway` (no torch) and `--target engine`.
# The tests read this file, they do not build it: they need no container engine.

ARG PYTHON=3.11-slim-bookworm

FROM python:${PYTHON} AS build
WORKDIR /src
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY constraints/pins.txt constraints/pins.txt
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY proto proto
COPY migrations migrations
COPY static static
COPY app app
# Without pip: it installs from outside, and is not in the images.
RUN python -m venv --without-pip /opt/chadburn \
 && pip wheel --no-deps -w /wheels .

FROM build AS build-gateway
RUN pip --python /opt/chadburn/bin/python install -c constraints/pins.txt "$(echo /wheels/*.whl)[postgres,otel]"

FROM build AS build-engine
# Where torch comes from: the CPU builds here, PyPI's or NVIDIA's for a machine with a GPU.
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
RUN pip --python /opt/chadburn/bin/python install -c constraints/pins.txt \
      --extra-index-url "${TORCH_INDEX_URL}" "$(echo /wheels/*.whl)[engine,otel]"

# ---- what both images share: no compiler, no pip cache, an account without rights ----
FROM python:${PYTHON} AS base
RUN useradd --system --uid 10001 --home-dir /var/lib/chadburn --create-home chadburn \
 && install -d -o chadburn -m 700 /run/chadburn
ENV PATH=/opt/chadburn/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001
WORKDIR /var/lib/chadburn
VOLUME /var/lib/chadburn
# Both end in good order on SIGTERM: streams say goodbye, an operation in flight stays in the ledger.
STOPSIGNAL SIGTERM
ENTRYPOINT ["chadburn"]

FROM base AS engine
COPY --from=build-engine /opt/chadburn /opt/chadburn
CMD ["engine"]

FROM base AS gateway
COPY --from=build-gateway /opt/chadburn /opt/chadburn
EXPOSE 8765
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s \
  CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8765/healthz', timeout=2)"]
CMD ["serve"]
