// What a call throws, as text that a test looks into.
#pragma once

#include <string>

namespace fold3d::test {

/// The text of the Error that `call` throws; empty where it throws none.
template <class Error, class Call>
std::string complaint_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace fold3d::test
