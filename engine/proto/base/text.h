// Formatting of durations in error texts.
#pragma once

#include <cstdio>
#include <string>

#include "proto/base/time.h"

namespace gradwire {

// "8.0 s", "120 s".
inline std::string seconds(Nanos duration) {
  const double value = static_cast<double>(duration) / static_cast<double>(kSecond);
  char text[32];
  std::snprintf(text, sizeof text, value < 100 ? "%.1f s" : "%.0f s", value);
  return text;
}

// A setting in seconds as its user writes it: "peer_timeout=2.5".
inline std::string setting(const char* name, Nanos duration) {
  char text[64];
  std::snprintf(text, sizeof text, "%s=%g", name,
                static_cast<double>(duration) / static_cast<double>(kSecond));
  return text;
}

}  // namespace gradwire
