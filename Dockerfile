# An image with gradwire, torch and the examples: docker build --tag gradwire .
#
# TORCH_INDEX: a further package index to take torch from (a CPU build is much smaller).
FROM python:3.12-slim AS build
RUN apt-get update && apt-get install --yes --no-install-recommends g++
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
ARG TORCH_INDEX=
COPY constraints.txt /tmp/
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt \
        ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} /wheels/*.whl \
    && rm -r /wheels
RUN useradd --create-home worker
USER worker
WORKDIR /home/worker
COPY examples examples
CMD ["gradwire", "doctor"]
