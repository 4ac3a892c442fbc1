#include "cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <vector>

#include "device.h"

namespace hybridc::opencl {

namespace {

constexpr char kMagic[] = "hybridc opencl 1\n";

// FNV-1a; names files and finds damage, and no more than that depends on it.
uint64_t checksum(const std::string& data) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (unsigned char byte : data) hash = (hash ^ byte) * 0x100000001b3u;
  return hash;
}

std::filesystem::path folder() {
  if (const char* chosen = std::getenv("HYBRIDC_OPENCL_CACHE")) return chosen;
  std::string base = environment("XDG_CACHE_HOME");
  if (base.empty()) {
    const std::string home = environment("HOME");
    if (home.empty()) return {};
    base = home + "/.cache";
  }
  return std::filesystem::path(base) / "hybridc" / "opencl";
}

std::filesystem::path path_of(const std::string& key) {
  char name[32];
  std::snprintf(name, sizeof(name), "%016llx.bin", static_cast<unsigned long long>(checksum(key)));
  return folder() / name;
}

std::string number(uint64_t value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof(value));
}

std::string encoded(const std::string& key, const std::string& binary) {
  return kMagic + number(key.size()) + key + number(binary.size()) + binary +
         number(checksum(binary));
}

// A regular file of this user's that nobody else may write; empty if it is anything else.
std::string read_own_file(const std::filesystem::path& path) {
  int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
  if (descriptor < 0) return "";
  struct stat status {};
  std::string data;
  bool own = fstat(descriptor, &status) == 0 && S_ISREG(status.st_mode) &&
             status.st_uid == geteuid() && (status.st_mode & (S_IWGRP | S_IWOTH)) == 0;
  if (own) {
    data.resize(static_cast<size_t>(status.st_size));
    size_t filled = 0;
    while (filled < data.size()) {
      ssize_t count = read(descriptor, data.data() + filled, data.size() - filled);
      if (count <= 0) break;
      filled += static_cast<size_t>(count);
    }
    data.resize(filled);
  }
  close(descriptor);
  return data;
}

bool write_all(int descriptor, const std::string& data) {
  size_t written = 0;
  while (written < data.size()) {
    ssize_t count = write(descriptor, data.data() + written, data.size() - written);
    if (count <= 0) return false;
    written += static_cast<size_t>(count);
  }
  return true;
}

}  // namespace

std::string read_cached(const std::string& key) {
  if (folder().empty()) return "";
  const std::string data = read_own_file(path_of(key));
  const std::string head = kMagic + number(key.size()) + key;
  const size_t frame = head.size() + 2 * sizeof(uint64_t);
  if (data.size() <= frame || data.compare(0, head.size(), head) != 0) return "";
  const std::string binary = data.substr(head.size() + sizeof(uint64_t), data.size() - frame);
  return encoded(key, binary) == data ? binary : "";
}

void write_cached(const std::string& key, const std::string& binary) {
  if (binary.empty() || folder().empty()) return;
  std::error_code ignored;
  const std::filesystem::path path = path_of(key);
  std::filesystem::create_directories(path.parent_path(), ignored);
  std::string temporary = path.string() + ".XXXXXX";
  int descriptor = mkostemp(temporary.data(), O_CLOEXEC);
  if (descriptor < 0) return;
  bool complete = write_all(descriptor, encoded(key, binary));
  complete = close(descriptor) == 0 && complete;
  if (!complete || std::rename(temporary.c_str(), path.c_str()) != 0) unlink(temporary.c_str());
}

}  // namespace hybridc::opencl
