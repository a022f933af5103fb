#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <string>

namespace fold3d::test {

/// A name of shared memory that no other process has, taken away at the end.
class SharedName {
 public:
  explicit SharedName(const std::string& test) : text_("fold3d-test-" + test + "-" + std::to_string(::getpid())) {}
  ~SharedName() { ::shm_unlink(("/" + text_).c_str()); }
  SharedName(const SharedName&) = delete;
  SharedName& operator=(const SharedName&) = delete;
  const std::string& text() const { return text_; }

 private:
  const std::string text_;
};

}  // namespace fold3d::test
