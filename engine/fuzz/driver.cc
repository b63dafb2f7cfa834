// Runs a fuzz target where no libFuzzer is: the files of its corpora, then mutations of these from
// a seed. Nothing tells it which code an input reaches, so it finds less than libFuzzer does.
//
//   fuzz_wire_driver [-max_total_time=SECONDS] [-seed=N] [-runs=N] FILE_OR_FOLDER…
//
// The input that ends the process stands in the file crash-driver, in the working directory.
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "fuzz/input.h"
#include "sim/random.h"

namespace {

using Bytes = std::vector<uint8_t>;
namespace fs = std::filesystem;

constexpr size_t kLongest = 4096;
Bytes current;

// Only what POSIX allows in a handler.
void keep_input(int signal) {
  if (std::FILE* file = std::fopen("crash-driver", "wb")) {
    std::fwrite(current.data(), 1, current.size(), file);
    std::fclose(file);
  }
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

void run(Bytes bytes) {
  current = std::move(bytes);
  LLVMFuzzerTestOneInput(current.data(), current.size());
}

Bytes read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// One of the changes that libFuzzer makes, too.
void mutate(Bytes& bytes, const std::vector<Bytes>& corpus, gradwire::sim::Random& random) {
  const size_t at = bytes.empty() ? 0 : random.below(bytes.size());
  const auto here = bytes.begin() + static_cast<ptrdiff_t>(at);
  switch (bytes.empty() ? 1 : random.below(7)) {
    case 0:
      bytes[at] ^= static_cast<uint8_t>(1u << random.below(8));
      break;
    case 1:
      bytes.insert(here, 1 + random.below(8), static_cast<uint8_t>(random.next()));
      break;
    case 2:
      bytes.erase(here, here + static_cast<ptrdiff_t>(random.below(bytes.size() - at) + 1));
      break;
    case 3:
      bytes[at] = static_cast<uint8_t>(random.next());
      break;
    case 4:
      bytes[at] = random.chance(0.5) ? 0xff : 0;
      break;
    case 5: {  // goes on like another one
      const Bytes& other = corpus[random.below(corpus.size())];
      const size_t from = other.empty() ? 0 : random.below(other.size());
      bytes.resize(at);
      bytes.insert(bytes.end(), other.begin() + static_cast<ptrdiff_t>(from), other.end());
      break;
    }
    default: {  // says a part of itself twice
      const Bytes part(here, here + static_cast<ptrdiff_t>(random.below(bytes.size() - at) + 1));
      bytes.insert(bytes.begin() + static_cast<ptrdiff_t>(random.below(bytes.size())), part.begin(),
                   part.end());
    }
  }
  if (bytes.size() > kLongest) bytes.resize(kLongest);
}

}  // namespace

int main(int count, char** words) {
  double seconds = 0;
  uint64_t seed = 1;
  uint64_t runs = UINT64_MAX;
  std::vector<Bytes> corpus;
  for (int i = 1; i < count; ++i) {
    const std::string word = words[i];
    const size_t equals = word.find('=');
    if (word.front() == '-') {
      const double number = equals == std::string::npos ? 0 : std::atof(words[i] + equals + 1);
      if (word.starts_with("-max_total_time=")) seconds = number;
      if (word.starts_with("-seed=")) seed = static_cast<uint64_t>(number);
      if (word.starts_with("-runs=")) runs = static_cast<uint64_t>(number);
      continue;  // libFuzzer has more
    }
    if (!fs::is_directory(word)) {
      corpus.push_back(read(word));
      continue;
    }
    for (const auto& entry : fs::directory_iterator(word)) corpus.push_back(read(entry.path()));
  }
  for (const int signal : {SIGABRT, SIGSEGV, SIGFPE, SIGILL, SIGBUS})
    std::signal(signal, keep_input);
  for (const Bytes& bytes : corpus) run(bytes);
  const size_t files = corpus.size();
  if (corpus.empty()) corpus.emplace_back();
  gradwire::sim::Random random(seed);
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  uint64_t done = 0;
  for (; done < runs && std::chrono::steady_clock::now() < end; ++done) {
    Bytes bytes = corpus[random.below(corpus.size())];
    for (uint64_t changes = 1 + random.below(4); changes > 0; --changes)
      mutate(bytes, corpus, random);
    run(std::move(bytes));
  }
  std::printf("%zu files and %llu mutations of seed %llu, without coverage feedback\n", files,
              static_cast<unsigned long long>(done), static_cast<unsigned long long>(seed));
}
