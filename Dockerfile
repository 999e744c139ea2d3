# Two images: `router` without torch, and `worker` for prefill and decode. See docs/operations.md, "Containers".
#
#   docker build --target router -t paceline-router .
#   docker build --target worker -t paceline-worker .
#
# BASE_IMAGE            any image with Python 3.11 or newer, its venv module and its headers; with cc, or with apt-get
# PIP_EXTRA_INDEX_URL   an index with CPU builds of torch, for a worker image without CUDA libraries
# PIP_FIND_LINKS        a page or folder with wheels to prefer
# secret pip_conf       a pip.conf of yours; secret ca_bundle: certificates of your proxy. Neither stays in an image.
ARG BASE_IMAGE=python:3.12-slim

FROM ${BASE_IMAGE} AS base
ENV PATH=/opt/paceline/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
RUN python3 -m venv /opt/paceline

FROM base AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY protos protos
COPY kernels kernels
COPY kvtransfer kvtransfer
COPY services services
COPY src src
ARG PIP_EXTRA_INDEX_URL PIP_FIND_LINKS
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf \
    --mount=type=secret,id=ca_bundle,target=/etc/ssl/certs/ca-certificates.crt \
    pip wheel --no-deps --wheel-dir /dist .

# Dependencies come before the project's own wheel, so that a change of code does not fetch them again.
FROM base AS dependencies
WORKDIR /src
COPY pyproject.toml constraints.txt ./
RUN python3 -c "import tomllib; \
    project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
    open('base.txt', 'w').write('\\n'.join(project['dependencies'])); \
    open('worker.txt', 'w').write('\\n'.join(project['optional-dependencies']['worker']))"
ARG PIP_EXTRA_INDEX_URL PIP_FIND_LINKS
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf \
    --mount=type=secret,id=ca_bundle,target=/etc/ssl/certs/ca-certificates.crt \
    pip install --no-cache-dir -c constraints.txt -r base.txt

FROM dependencies AS worker-dependencies
ARG PIP_EXTRA_INDEX_URL PIP_FIND_LINKS
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf \
    --mount=type=secret,id=ca_bundle,target=/etc/ssl/certs/ca-certificates.crt \
    pip install --no-cache-dir -c constraints.txt "$(grep '^torch==' constraints.txt)" \
 && pip install --no-cache-dir -c constraints.txt -r worker.txt

FROM base AS runtime
# The cache folder exists with its owner before a volume is laid over it: a new volume takes both over.
RUN groupadd --gid 10001 paceline \
 && useradd --uid 10001 --gid 10001 --home-dir /var/lib/paceline --create-home paceline \
 && install -d -o paceline -g paceline /var/cache/paceline
ENV PACELINE_HOST=0.0.0.0 PACELINE_CACHE_DIR=/var/cache/paceline
WORKDIR /var/lib/paceline
USER paceline
ENTRYPOINT ["paceline"]
STOPSIGNAL SIGTERM

FROM runtime AS worker
USER root
# Kernels are compiled where they run: Triton's launchers on a GPU, which cannot do without, and those in C on a CPU.
RUN command -v cc >/dev/null \
 || { apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; }
COPY --from=worker-dependencies /opt/paceline /opt/paceline
RUN --mount=type=bind,from=wheel,source=/dist,target=/dist pip install --no-cache-dir --no-deps --no-index /dist/*.whl
USER paceline
EXPOSE 7080 7090

FROM runtime AS router
COPY --from=dependencies /opt/paceline /opt/paceline
USER root
RUN --mount=type=bind,from=wheel,source=/dist,target=/dist pip install --no-cache-dir --no-deps --no-index /dist/*.whl
USER paceline
EXPOSE 7070
CMD ["router"]
